//! Scenarios over several crates: a whole guest, both sides, real sockets. They live in `tests/`.
