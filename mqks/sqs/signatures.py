"""Signatures of requests: Signature Version 4, as AWS documents it ("Create a signed AWS API
request").

The one rule: what was signed is computed from what was received, and compared in constant time.
"""

import hmac
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Final, TypeVar
from urllib.parse import parse_qsl, quote

from mqks.sqs.errors import SqsError

_ALGORITHM: Final = "AWS4-HMAC-SHA256"
_SKEW: Final = timedelta(minutes=15)
U = TypeVar("U")


def verified(
    method: str,
    raw_path: str,
    query: str,
    headers: Sequence[tuple[str, str]],
    body: bytes,
    find: Callable[[str], tuple[U, str] | None],
    now: datetime,
) -> U:
    """Who has signed the request; `find` returns who has an access key, and its secret; the names
    of headers are in lower case. Raises SqsError."""
    named = dict(headers)
    algorithm, _, told = named.get("authorization", "").partition(" ")
    if algorithm != _ALGORITHM:
        raise SqsError("MissingAuthenticationToken", "The request has no signature.", 403)
    parts = dict(part.strip().partition("=")[::2] for part in told.split(","))
    access_key, *scope = parts.get("Credential", "").split("/")
    found = find(access_key)
    if found is None or len(scope) != 4:
        reason = "The security token included in the request is invalid."
        raise SqsError("InvalidClientTokenId", reason, 403)
    stamp, signed = named.get("x-amz-date", ""), parts.get("SignedHeaders", "").split(";")
    try:
        at = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        at = datetime.min.replace(tzinfo=UTC)
    if abs(now - at) > _SKEW or not stamp.startswith(scope[0]) or "host" not in signed:
        raise SqsError("SignatureDoesNotMatch", f"Signature not of now: {stamp!r:.40}", 403)
    values = [
        f"{name}:{','.join(' '.join(each.split()) for key, each in headers if key == name)}\n"
        for name in signed
    ]
    pairs = sorted((quote(k, "~"), quote(v, "~")) for k, v in parse_qsl(query, True))
    canonical = "\n".join(
        (
            method,
            quote(raw_path, "/~"),
            "&".join(f"{key}={value}" for key, value in pairs),
            "".join(values),
            ";".join(signed),
            sha256(body).hexdigest(),
        )
    )
    text = "\n".join((_ALGORITHM, stamp, "/".join(scope), sha256(canonical.encode()).hexdigest()))
    key = f"AWS4{found[1]}".encode()
    for each in (*scope, text):
        key = hmac.digest(key, each.encode(), "sha256")
    if not hmac.compare_digest(key.hex().encode(), parts.get("Signature", "").encode()):
        reason = "The request signature we calculated does not match the signature you provided."
        raise SqsError("SignatureDoesNotMatch", reason, 403)
    return found[0]
