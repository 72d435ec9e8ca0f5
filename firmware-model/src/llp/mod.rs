//! The lower layer protocol: MPA over a byte stream, or a loopback (the seam of RFC 5041 §3).
