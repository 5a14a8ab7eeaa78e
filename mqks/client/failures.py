"""The reasons of failed connections, with a hint what to do.

The one rule: the text of the system or OpenSSL is included, so that it can be searched for.
"""

import ssl

from mqks.client.urls import Address
from mqks.errors import reason

NOT_TLS = {
    "WRONG_VERSION_NUMBER",
    "UNEXPECTED_EOF_WHILE_READING",
    "RECORD_LAYER_FAILURE",
    "PACKET_LENGTH_TOO_LONG",
    "UNKNOWN_PROTOCOL",
    "BAD_RECORD_TYPE",
}
"""The errors of OpenSSL for an answer that is not TLS."""
OTHER_NAME = 62, 64
"""Its codes for a certificate with another host name or address."""
PLAIN = "the port does not speak TLS: write mqks://, or use the tls_port of the server"
TLS_HINT = "if the port speaks TLS, write mqkss:// in the URL"
TLS_FIRST = b"\x15\x03", b"\x16\x03"
"""The first bytes of TLS answers."""


def of_handshake(error: BaseException, address: Address) -> str:
    """Why a TLS handshake failed."""
    cause = error.__cause__ or error
    if isinstance(cause, ssl.SSLCertVerificationError):
        why = cause.verify_message
        if cause.verify_code in OTHER_NAME:
            return f"the certificate of {address} is for another name: {why}"
        return (
            f"the certificate of {address} is not trusted: {why}; name a file with its authority: "
            "SSL_CERT_FILE=ca.pem in the environment, or in Python "
            "Options(ssl_context=ssl.create_default_context(cafile='ca.pem'))"
        )
    if isinstance(cause, ssl.SSLError) and cause.reason not in NOT_TLS:
        return f"the TLS handshake failed: {cause}"
    if isinstance(cause, TimeoutError):
        return f"no answer to the TLS handshake; perhaps {PLAIN}"
    if isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER":
        return f"{PLAIN} ({cause.reason})"
    told = reason(cause) if isinstance(cause, OSError) else type(cause).__name__
    return f"the server closed the connection in the TLS handshake; perhaps {PLAIN} ({told})"
