//! Models of which each rank has a part, against one process that has all of it.

mod fsdp;
mod leaving;
mod link;
mod mesh;
mod model;
mod pipeline;
mod plan;
mod state;
mod tensor;
