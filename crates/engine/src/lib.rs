//! Source and destination of a migration as sans-io state machines
