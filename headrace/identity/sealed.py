"""Text that only the holder of one key reads, for a way on which others may listen or keep copies (RFC 9180, HPKE).

It hides the text. It does not show who wrote it.
"""

import base64

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)


class SealKey:
    """A fresh key. It lives in this process only."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw().hex()
        """To seal text for this key."""

    def unseal(self, sealed: str) -> str:
        """The text. Raises ValueError for one that was sealed for another key, or changed."""
        try:
            return SUITE.decrypt(base64.b64decode(sealed), self._private).decode()
        except InvalidTag:
            raise ValueError("the text was sealed for another key, or changed on its way") from None


def seal(text: str, public: str) -> str:
    """`text` for the holder of the key that belongs to `public`."""
    key = X25519PublicKey.from_public_bytes(bytes.fromhex(public))
    return base64.b64encode(SUITE.encrypt(text.encode(), key)).decode()
