//! Nothing: the command is in `main.rs`. Cargo lets a package depend only on one with a library, and the Python package depends on this one.
#![forbid(unsafe_code)]
