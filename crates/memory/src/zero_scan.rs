//! Whether a page is all zero, with the widest loads that the processor has, chosen at run time.
//!
//! Loads are volatile: the guest may write the page meanwhile. A page that changes while it is looked at is in the dirty
//! log, so either answer will do.

use std::ptr;
use std::sync::OnceLock;

/// Bytes of a page.
const PAGE: usize = 4096;

/// A way to look at a page.
///
/// # Safety
/// To call one, 4096 bytes at the address must be readable, 64-byte aligned unless it is `zero_by_words`'s 8.
type Scan = unsafe fn(*const u8) -> bool;

/// Whether the page at `addr` is all zero.
///
/// # Safety
/// 4096 bytes at `addr` are mapped and readable; `addr` is a multiple of 64.
pub(crate) unsafe fn is_zero(addr: usize) -> bool {
    static BEST: OnceLock<Scan> = OnceLock::new();
    let scan = *BEST.get_or_init(|| {
        candidates()
            .into_iter()
            .rev()
            .map(|(_, scan)| scan)
            .next()
            .unwrap_or(zero_by_words)
    });
    let at = ptr::with_exposed_provenance(addr);
    // SAFETY: the caller's promise; candidates are only those that this processor can run.
    unsafe { scan(at) }
}

/// Whether 4096 bytes of our own are all zero.
pub(crate) fn is_zero_page(page: &[u8; PAGE]) -> bool {
    page.as_chunks::<64>().0.iter().all(|line| *line == [0; 64])
}

/// The ways that this processor has, the widest last.
fn candidates() -> Vec<(&'static str, Scan)> {
    #[cfg_attr(not(target_arch = "x86_64"), expect(unused_mut))]
    let mut ways: Vec<(&'static str, Scan)> = vec![("u64", zero_by_words)];
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx2") {
            ways.push(("avx2", x86::zero_by_avx2));
        }
        if is_x86_feature_detected!("avx512f") {
            ways.push(("avx512", x86::zero_by_avx512));
        }
    }
    ways
}

/// Eight words at a time.
///
/// # Safety
/// 4096 bytes at `page` are readable; `page` is a multiple of 8.
unsafe fn zero_by_words(page: *const u8) -> bool {
    let words = page.cast::<u64>();
    (0..PAGE / 64).all(|line| {
        let mut any = 0;
        for i in 0..8 {
            // SAFETY: the caller's promise; line * 8 + i is below 512.
            any |= unsafe { words.add(line * 8 + i).read_volatile() };
        }
        any == 0
    })
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::PAGE;
    use std::arch::x86_64::{
        __m256i, __m512i, _mm256_or_si256, _mm256_testz_si256, _mm512_or_si512, _mm512_test_epi64_mask,
    };

    /// 128 bytes at a time.
    ///
    /// # Safety
    /// 4096 bytes at `page` are readable; `page` is a multiple of 32; the processor has AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn zero_by_avx2(page: *const u8) -> bool {
        let vectors = page.cast::<__m256i>();
        for i in (0..PAGE / 32).step_by(4) {
            // SAFETY: the caller's promise; i + 3 is below 128.
            let [a, b, c, d] = unsafe { [0, 1, 2, 3].map(|k| vectors.add(i + k).read_volatile()) };
            let any = _mm256_or_si256(_mm256_or_si256(a, b), _mm256_or_si256(c, d));
            if _mm256_testz_si256(any, any) == 0 {
                return false;
            }
        }
        true
    }

    /// 256 bytes at a time.
    ///
    /// # Safety
    /// 4096 bytes at `page` are readable; `page` is a multiple of 64; the processor has AVX-512F.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn zero_by_avx512(page: *const u8) -> bool {
        let vectors = page.cast::<__m512i>();
        for i in (0..PAGE / 64).step_by(4) {
            // SAFETY: the caller's promise; i + 3 is below 64.
            let [a, b, c, d] = unsafe { [0, 1, 2, 3].map(|k| vectors.add(i + k).read_volatile()) };
            let any = _mm512_or_si512(_mm512_or_si512(a, b), _mm512_or_si512(c, d));
            if _mm512_test_epi64_mask(any, any) != 0 {
                return false;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(64))]
    struct Page([u8; PAGE]);

    #[test]
    fn every_way_sees_every_single_bit_position() {
        let mut page = Box::new(Page([0; PAGE]));
        for (name, scan) in candidates() {
            // SAFETY: a page of our own, aligned to 64.
            unsafe {
                assert!(scan(page.0.as_ptr()), "{name}");
                for i in 0..PAGE {
                    page.0[i] = 1 << (i % 8);
                    assert!(!scan(page.0.as_ptr()), "{name} overlooked byte {i}");
                    assert!(!is_zero_page(&page.0));
                    page.0[i] = 0;
                }
            }
        }
        assert!(is_zero_page(&page.0));
    }
}
