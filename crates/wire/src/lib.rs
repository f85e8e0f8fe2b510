//! What crosses the network: preamble, control frames, page batches
