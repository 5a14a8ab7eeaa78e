"""The TLS context, and texts for failed handshakes.

The one rule: nothing is asked on a terminal, and versions below 1.2 are refused.
"""

import ssl
from _ssl import _test_decode_cert as certificate_of  # type: ignore[attr-defined]

from mqks.errors import ConfigurationError
from mqks.settings import Settings


class Context(ssl.SSLContext):
    expires_s = 0.0
    """When its certificate expires, in seconds since the epoch."""
    serial = ""


def make_context(settings: Settings) -> Context:
    """Raises ConfigurationError."""
    context = Context(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    # A client that only publishes never reads them, and closing with unread data resets the
    # connection: what the server had not read yet would be lost.
    context.num_tickets = 0
    assert settings.tls_cert is not None
    try:
        # An empty password: otherwise OpenSSL asks for the one of an encrypted key on the terminal.
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
        certificate = certificate_of(settings.tls_cert)
        context.expires_s = ssl.cert_time_to_seconds(str(certificate["notAfter"]))
        context.serial = str(certificate["serialNumber"])
    except (OSError, ValueError) as error:
        files = f"{settings.tls_cert}, {settings.tls_key}"
        raise ConfigurationError(f"tls_cert, tls_key: {files}: {reason_of(error)}") from None
    if settings.tls_client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(settings.tls_client_ca)
        except (OSError, ValueError) as error:
            place = f"tls_client_ca: {settings.tls_client_ca}"
            raise ConfigurationError(f"{place}: {reason_of(error)}") from None
    return context


def reason_of(error: Exception, otherwise: str = "not PEM") -> str:
    """`otherwise` is that of an error for which OpenSSL has no text."""
    if isinstance(error, ssl.SSLZeroReturnError):
        return "the client closed the connection"
    if isinstance(error, ssl.SSLError):
        return (error.reason or otherwise).replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error)
