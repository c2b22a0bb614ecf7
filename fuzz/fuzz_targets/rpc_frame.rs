#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    phalanx::fuzzing::rpc_frame(bytes);
});
