"""Stock Linux under a real KVM, on a machine without one: two emulated hosts, and guests that move between them."""
