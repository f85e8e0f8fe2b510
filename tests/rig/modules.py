"""Kernel modules in the order in which they can be loaded: what a module needs comes before it."""

from emulated.basics import ScriptError

_DEPENDS = b"depends="


def _names(module):
    """The modules that this one names in its .modinfo section, as `depends=a,b`."""
    for text in module.read_bytes().split(b"\0"):
        if text.startswith(_DEPENDS):
            return [name for name in text[len(_DEPENDS) :].decode().split(",") if name]
    return []


def _key(name):
    return name.replace("-", "_")


def in_order(tree, wanted):
    """Paths of the modules `wanted`, and of all that they need, from the kernel's tree of modules."""
    found = {_key(path.name.removesuffix(".ko")): path for path in tree.rglob("*.ko")}
    order = []
    on_the_way = []

    def visit(name):
        path = found.get(_key(name))
        if path is None:
            raise ScriptError(f"the kernel in {tree} has no module {name}, which {on_the_way or 'the rig'} needs")
        if path in order:
            return
        if name in on_the_way:
            raise ScriptError(f"modules need each other in a circle: {' '.join(on_the_way)} {name}")
        on_the_way.append(name)
        for needed in _names(path):
            visit(needed)
        on_the_way.pop()
        order.append(path)

    for name in wanted:
        visit(name)
    return order
