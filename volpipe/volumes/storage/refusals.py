"""What the errors of stores mean, and what to do.

Not here: the sentence on a place (object_store), or damaged bytes on a disk (damage).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

DAMAGE = ("FAILED_PRECONDITION", "DATA_LOSS", "INVALID_ARGUMENT", "OUT_OF_RANGE")  # tensorstore's words for it
DENIED = r"40[13] (Unauthorized|Forbidden)|AccessDenied|PERMISSION_DENIED"
REASONS: Mapping[str, str] = {
    r"NoSuchBucket": "there is no bucket {bucket}; check its name, and the endpoint ({server})",
    rf"{DENIED}|InvalidAccessKeyId|SignatureDoesNotMatch": (
        "access denied ({signed}); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; "
        "where a bucket may be read but not listed, give the whole key of the array"
    ),
    r"PermanentRedirect|Redirect|redirect|AuthorizationHeaderMalformed|301 ": (
        "the bucket lies in another region than {region}; set AWS_REGION, or add ?region=NAME to the location"
    ),
    r"range .* was ignored|non-partial response|Range request not supported": (
        "{server} sends whole files alone, and sharded arrays are read in parts; copy it to a folder or to s3://"
    ),
    r"error sending request|timed out|Timeout was reached|Could not (connect|resolve)|curl_code": (
        "no answer from {server}; check the address, ?endpoint= or AWS_ENDPOINT_URL, and the network"
    ),
}


def is_damage(error: Exception) -> bool:
    """Tell whether `error` is about the bytes that came, not about the way to them."""
    text = str(error)
    return text.startswith(DAMAGE) and not any(re.search(pattern, text) for pattern in REASONS)
