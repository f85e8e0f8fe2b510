"""Kernel modules in the order in which they can be loaded: what a module needs comes before it."""

import lzma

from emulated.basics import ScriptError

_DEPENDS = b"depends="


_PACKED = ".xz"


def name(path):
    """A module's file name, without what says that it is compressed."""
    return path.name.removesuffix(_PACKED)


def content(path):
    """A module's bytes: kernels are packaged with compressed ones since 6.7, and the guest's busybox loads plain ones."""
    data = path.read_bytes()
    return lzma.decompress(data) if path.name.endswith(_PACKED) else data


def _names(module):
    """The modules that this one names in its .modinfo section, as `depends=a,b`."""
    for text in content(module).split(b"\0"):
        if text.startswith(_DEPENDS):
            return [needed for needed in text[len(_DEPENDS) :].decode().split(",") if needed]
    return []


def _key(text):
    return text.replace("-", "_")


def in_order(tree, wanted):
    """Paths of the modules `wanted`, and of all that they need, from the kernel's tree of modules."""
    found = {_key(name(path).removesuffix(".ko")): path for path in tree.rglob("*.ko*")}
    order = []
    on_the_way = []

    def visit(module):
        path = found.get(_key(module))
        if path is None:
            raise ScriptError(f"the kernel in {tree} has no module {module}, which {on_the_way or 'the rig'} needs")
        if path in order:
            return
        if module in on_the_way:
            raise ScriptError(f"modules need each other in a circle: {' '.join(on_the_way)} {module}")
        on_the_way.append(module)
        for needed in _names(path):
            visit(needed)
        on_the_way.pop()
        order.append(path)

    for module in wanted:
        visit(module)
    return order
