//! Lines of a bounded length from a socket.

use std::io;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};

/// Reads lines.
pub(crate) struct Lines<R> {
    from: BufReader<R>,
    line: Vec<u8>,
    most_bytes: usize,
    /// The line was given out: the next one starts afresh.
    given: bool,
}

/// Why there is no line.
#[derive(Debug)]
pub(crate) enum NoLine {
    /// The other side has closed.
    End,
    /// It is longer than may be. What follows would be its rest, so nothing more can be read.
    TooLong,
    /// The socket failed.
    Broken(io::Error),
}

impl<R: AsyncRead + Unpin> Lines<R> {
    pub(crate) fn new(from: R, most_bytes: usize) -> Self {
        Lines {
            from: BufReader::new(from),
            line: Vec::new(),
            most_bytes,
            given: false,
        }
    }

    /// The next line, its end left out. What comes after the last line's end is no line. Cancel-safe: what was read stays
    /// for the next call.
    pub(crate) async fn next(&mut self) -> Result<&[u8], NoLine> {
        if self.given {
            self.line.clear();
            self.given = false;
        }
        loop {
            let read = self.from.fill_buf().await.map_err(NoLine::Broken)?;
            if read.is_empty() {
                return Err(NoLine::End);
            }
            let end = read.iter().position(|&byte| byte == b'\n');
            let taken = end.map_or(read.len(), |at| at + 1);
            if self.line.len() + taken > self.most_bytes {
                return Err(NoLine::TooLong);
            }
            self.line.extend_from_slice(&read[..end.unwrap_or(taken)]);
            self.from.consume(taken);
            if end.is_some() {
                self.given = true;
                return Ok(&self.line);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lines_are_cut_at_their_ends_and_bounded() {
        let text = [&b"one\n\ntwo"[..], b" more\nlast"].concat();
        let mut lines = Lines::new(&text[..], 9);
        assert_eq!(lines.next().await.unwrap(), b"one");
        assert_eq!(lines.next().await.unwrap(), b"");
        assert_eq!(lines.next().await.unwrap(), b"two more");
        assert!(matches!(lines.next().await, Err(NoLine::End)));
        let mut lines = Lines::new(&b"12345678\n123456789\n"[..], 9);
        assert_eq!(lines.next().await.unwrap(), b"12345678");
        assert!(matches!(lines.next().await, Err(NoLine::TooLong)));
    }

    #[tokio::test]
    async fn a_line_without_end_takes_no_more_than_it_may() {
        let endless = tokio::io::repeat(b'x');
        let mut lines = Lines::new(endless, 1 << 20);
        assert!(matches!(lines.next().await, Err(NoLine::TooLong)));
        assert!(lines.line.len() <= 1 << 20);
    }
}
