//! The VM, and what of it lives in the kernel.
