//! Scenarios over several crates
