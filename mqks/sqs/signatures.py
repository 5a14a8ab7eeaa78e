"""Signatures of requests: Signature Version 4, as AWS documents it in "Create a signed AWS API
request".

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
    place: tuple[str, str, str],
    headers: Sequence[tuple[str, str]],
    body: bytes,
    find: Callable[[str], tuple[U, str] | None],
    now: datetime,
) -> U:
    """Who has signed the request. `place` is its method, path and query; `find` returns who has an
    access key, and the secret; the names of headers are in lower case. Raises SqsError."""
    method, path, query = place
    named = dict(headers)
    algorithm, _, told = named.get("authorization", "").partition(" ")
    if algorithm != _ALGORITHM:
        raise SqsError("MissingAuthenticationToken", "The request has no signature.", 403)
    parts = dict(part.strip().partition("=")[::2] for part in told.split(","))
    access_key, *scope = parts.get("Credential", "").split("/")
    found = find(access_key)
    if found is None or len(scope) != 4:
        raise SqsError("InvalidClientTokenId", "The access key or its scope is invalid.", 403)
    stamp, signed = named.get("x-amz-date", ""), parts.get("SignedHeaders", "").split(";")
    try:
        at = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        at = datetime.min.replace(tzinfo=UTC)
    if abs(now - at) > _SKEW or scope[0] != stamp[:8]:
        raise SqsError("SignatureDoesNotMatch", f"Signature expired: {stamp!r:.40}", 403)
    if missing := {"host", *({"x-amz-target"} & named.keys())} - {*signed}:
        raise SqsError("SignatureDoesNotMatch", f"The header {min(missing)} must be signed.", 403)
    values = [" ".join(" ".join(v.split()) for k, v in headers if k == name) for name in signed]
    pairs = sorted((quote(k, "~"), quote(v, "~")) for k, v in parse_qsl(query, True))
    canonical = (
        *(method, quote(path, "/~"), "&".join(f"{k}={v}" for k, v in pairs)),
        *(f"{name}:{value}" for name, value in zip(signed, values, strict=True)),
        *("", ";".join(signed), sha256(body).hexdigest()),
    )
    digest = sha256("\n".join(canonical).encode()).hexdigest()
    key = f"AWS4{found[1]}".encode()
    for each in (*scope, "\n".join((_ALGORITHM, stamp, "/".join(scope), digest))):
        key = hmac.digest(key, each.encode(), "sha256")
    if not hmac.compare_digest(key.hex().encode(), parts.get("Signature", "").encode()):
        raise SqsError("SignatureDoesNotMatch", "The signature is not that of the request.", 403)
    return found[0]
