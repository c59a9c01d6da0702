"""Blobs in a bucket of S3, or of a server that speaks its protocol.

Credentials come from where every AWS client finds them (environment, profile, role of the machine), through botocore.
"""

import logging
import os
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import botocore.exceptions
import botocore.session
import httpx
from obstore.store import S3Store

from headrace.blob.bucket import CONNECT_S, SILENCE_S, BucketBlobs, client_options, endpoint_of, retry_config
from headrace.blob.store_address import StoreAddress

if TYPE_CHECKING:
    from obstore.store import ObjectStore

logging.getLogger("botocore.credentials").setLevel(logging.WARNING)  # it tells of each client where they are from

CREDENTIALS_S = 600.0
"""How long credentials are used before botocore is asked again, which renews those that end."""


class S3Blobs(BucketBlobs):
    """A conditional put names an object's ETag."""

    failures = (*BucketBlobs.failures, botocore.exceptions.BotoCoreError)
    no_bucket = "NoSuchBucket"

    def __init__(self, address: StoreAddress, role: str) -> None:
        self._region = _region_of(address)
        super().__init__(address, role)

    def _client(self, silence_s: float) -> "ObjectStore":
        address, region = self.address, self._region
        endpoint = _endpoint(address, region)
        return S3Store(
            address.bucket,
            config={
                "aws_endpoint_url_s3": endpoint,
                **({} if region is None else {"region": region}),
                "virtual_hosted_style_request": "endpoint_override" not in address.options
                and "." not in address.bucket,
                "disable_bulk_delete": True,  # a request that every server has
            },
            client_options=client_options(address.options, endpoint, silence_s),
            retry_config=retry_config(),
            credential_provider=_Credentials(),
        )


def _endpoint(address: StoreAddress, region: str | None) -> str:
    """Where requests go: always said, or the environment would say it."""
    host = f"s3.{region or 'us-east-1'}.amazonaws.com" + (".cn" if (region or "").startswith("cn-") else "")
    return endpoint_of(address, host if "." in address.bucket else f"{address.bucket}.{host}")


def _region_of(address: StoreAddress) -> str | None:
    """As the address says it, or else as Amazon does; None where nothing says it."""
    options = address.options
    if "region" in options or "endpoint_override" in options:
        region = options.get("region") or os.environ.get("AWS_REGION")
        return region or botocore.session.Session().get_config_variable("region")
    with httpx.Client(trust_env=False, timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S)) as client:
        answer = client.head(f"https://s3.amazonaws.com/{quote(address.bucket, safe='')}")
    region = answer.headers.get("x-amz-bucket-region")
    if region is None:
        raise ValueError(f"Amazon knows no region of the bucket {address.bucket}")
    return str(region)


class _Credentials:
    """Keys as botocore finds them, whenever the client asks."""

    def __init__(self) -> None:
        self._session = botocore.session.Session()

    def __call__(self) -> Any:
        found = self._session.get_credentials()
        if found is None:
            raise ValueError("no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE")
        keys = found.get_frozen_credentials()
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token,
            "expires_at": datetime.now(UTC) + timedelta(seconds=CREDENTIALS_S),
        }
