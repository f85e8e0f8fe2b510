#![no_main]
libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzz_targets::source_engine(input));
