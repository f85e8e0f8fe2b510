#![no_main]
libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzz_targets::layout_and_free_map(input));
