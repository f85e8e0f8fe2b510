//! From files to a guest that can be started.
