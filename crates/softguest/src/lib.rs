//! A guest without KVM: its own page allocator and balloon driver over real virtqueues
