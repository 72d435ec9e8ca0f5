//! CRC32C, the digest that ends every FPDU (RFC 5044 §4.4; RFC 3720 §12.1 and appendix B.4).
//!
//! Castagnoli's polynomial 0x1EDC6F41, reflected, all-ones start, final complement. The 32-bit
//! value goes on the wire least significant byte first, so `crc.to_le_bytes()` is the wire form.
//!
//! Only this module calls the `crc-fast` crate: at FPDU size it folds several times faster than the
//! plain CRC32 instruction.

/// The CRC32C of `bytes`.
#[inline]
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// The CRC32C of the bytes of all parts in order.
pub fn crc32c_of(parts: &[&[u8]]) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    for part in parts {
        digest.update(part);
    }
    digest.finalize() as u32
}
