"""Blobs in a bucket of Google Cloud Storage.

Credentials are those of Google's clients: a key of a service account, application default credentials, the instance.
"""

from typing import TYPE_CHECKING

from obstore.store import GCSStore

from headrace.blob.bucket import BucketBlobs, client_options, endpoint_of, retry_config

if TYPE_CHECKING:
    from obstore.store import ObjectStore

HOST = "storage.googleapis.com"


class GcsBlobs(BucketBlobs):
    """A conditional put names an object's generation, which each write makes anew."""

    no_bucket = "NoSuchBucket"
    version = "version"
    no_credentials = (
        "computeMetadata",
        "set GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT to a key's file, or run on an instance with a "
        "service account; GOOGLE_BEARER_TOKEN is any text for a server that asks for none",
    )

    def _client(self, silence_s: float) -> "ObjectStore":
        endpoint = endpoint_of(self.address, HOST)
        return GCSStore(
            self.address.bucket,
            config={"base_url": endpoint},
            client_options=client_options(self.address.options, endpoint, silence_s),
            retry_config=retry_config(),
        )
