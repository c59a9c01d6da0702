"""Blobs in a container of Azure Blob Storage, also of an account with folders (ADLS Gen2).

Credentials are those of Azure's clients: an account's key, a shared access signature, a service principal, workload
identity, the instance.
"""

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from obstore.store import AzureStore

from headrace.blob.bucket import BucketBlobs, client_options, endpoint_of, retry_config

if TYPE_CHECKING:
    from obstore.store import ObjectStore

    from headrace.blob.store_address import StoreAddress

HOST = "blob.core.windows.net"


class AzureBlobs(BucketBlobs):
    """A conditional put names an object's ETag."""

    no_bucket = "ContainerNotFound"
    no_credentials = (
        "metadata/identity",
        "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or AZURE_TENANT_ID, AZURE_CLIENT_ID and "
        "AZURE_CLIENT_SECRET, or run on an instance with a managed identity",
    )

    def _client(self, silence_s: float) -> "ObjectStore":
        account, endpoint = self.address.options["account"], account_endpoint(self.address)
        return AzureStore(
            self.address.bucket,
            config={
                "account_name": account,
                "endpoint": endpoint,
                "use_emulator": False,  # the environment could say so, and where it is
                "use_fabric_endpoint": False,
            },
            client_options=client_options(self.address.options, endpoint, silence_s),
            retry_config=retry_config(),
        )


def account_endpoint(address: "StoreAddress") -> str:
    """Where the account's containers are: a host of its own, or its name's folder at a server without such hosts."""
    account = address.options["account"]
    endpoint = endpoint_of(address, f"{account}.{HOST}")
    host = urlsplit(endpoint).hostname or ""
    return endpoint if host.startswith(f"{account}.") else f"{endpoint.rstrip('/')}/{account}"
