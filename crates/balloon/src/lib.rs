//! The virtio-balloon device, its dialects
