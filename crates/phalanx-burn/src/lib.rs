//! x
#![forbid(unsafe_code)]
#![allow(dead_code)]

mod bridge;
mod hook;
