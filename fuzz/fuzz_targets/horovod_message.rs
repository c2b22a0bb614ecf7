#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    phalanx_horovod::fuzzing::horovod_message(bytes);
});
