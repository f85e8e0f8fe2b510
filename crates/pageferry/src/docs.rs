#![doc = include_str!("../../../docs/embedding.md")]
