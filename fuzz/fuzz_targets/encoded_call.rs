#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    phalanx::fuzzing::encoded_call(bytes);
});
