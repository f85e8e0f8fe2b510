"""An initrd as a cpio archive.

It is written here and not by cpio(1) because it holds a device node, which only root could make on disk.
"""


def _entry(number, name, mode, data=b"", device=(0, 0)):
    """One member in `newc` format: a header of hexadecimal fields, the name, the data, each padded to 4 bytes."""
    encoded = name.encode() + b"\0"
    fields = [number, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(encoded), 0]
    header = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
    return header + b"\0" * (-len(header) % 4) + data + b"\0" * (-len(data) % 4)


class Archive:
    """Members, in the order in which the kernel is to make them: a folder comes before what is in it."""

    def __init__(self):
        self._parts = []
        self._folders = set()
        self.folder("dev")
        self._add("dev/console", 0o020600, b"", (5, 1))

    def _add(self, name, mode, data=b"", device=(0, 0)):
        self._parts.append(_entry(len(self._parts) + 1, name, mode, data, device))

    def folder(self, *names):
        """Folders, and those that they are in."""
        for name in names:
            parts = name.split("/")
            for end in range(1, len(parts) + 1):
                path = "/".join(parts[:end])
                if path and path not in self._folders:
                    self._folders.add(path)
                    self._add(path, 0o040755)

    def _into_folder(self, name):
        folder, _, _ = name.rpartition("/")
        if folder:
            self.folder(folder)

    def file(self, name, data, mode=0o644):
        """A file, and the folders that it is in."""
        self._into_folder(name)
        self._add(name, 0o100000 | mode, data)

    def program(self, name, data):
        """A file that can be run."""
        self.file(name, data, 0o755)

    def link(self, name, target):
        """A symbolic link."""
        self._into_folder(name)
        self._add(name, 0o120777, target.encode())

    def write(self, path):
        """Writes the archive, and returns where it is."""
        path.write_bytes(b"".join([*self._parts, _entry(0, "TRAILER!!!", 0)]))
        return path
