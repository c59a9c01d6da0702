"""A disk that fails when told to."""

from headrace.durable import RealDisk


class TroubledDisk(RealDisk):
    """A disk that fails as told: {operation: error number}; a failed append leaves half of the line."""

    def __init__(self):
        self.fails = {}

    def _maybe(self, operation):
        if operation in self.fails:
            raise OSError(self.fails[operation], f"{operation} failed")

    def append(self, file, data):
        if "append" in self.fails:
            super().append(file, data[: len(data) // 2])
        self._maybe("append")
        super().append(file, data)

    def sync(self, file):
        self._maybe("sync")
        super().sync(file)

    def truncate(self, file, length):
        self._maybe("truncate")
        super().truncate(file, length)

    def link(self, source, target):
        self._maybe("link")
        super().link(source, target)

    def sync_folder(self, path):
        self._maybe("sync_folder")
        super().sync_folder(path)

    def rename(self, source, target):
        self._maybe("rename")
        super().rename(source, target)

    def create(self, path):
        self._maybe("create")
        return super().create(path)
