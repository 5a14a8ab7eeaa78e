"""Why there is no connection, in words that say what to do about it.

The one rule: what the system or OpenSSL says stays in it, for those who look it up.
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
"""What OpenSSL makes of an answer that is not TLS."""
OTHER_NAME = 62, 64
"""Its codes for a certificate of another host name or address."""
PLAIN = "the port does not speak TLS: write mqks://, or name the server's tls_port"
TLS_HINT = "if the port speaks TLS, write mqkss:// in the URL"
TLS_FIRST = b"\x15\x03", b"\x16\x03"
"""How answers of TLS begin."""


def of_handshake(error: BaseException, address: Address) -> str:
    """Why a TLS handshake has failed."""
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
