//! Placeholder until the bench below is written.
fn main() {}
