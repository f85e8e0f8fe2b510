"""The bench: live migration by QEMU and by ours, of the same guest memory, in one run. `main.py` is where it starts."""
