//! Tests that need processes.
fn main() {}
