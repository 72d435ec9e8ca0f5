//! Control words of the Terminates of RFC 6581 §8: layer 2 (LLP), error type 0.

/// An error of this end that has no specific code.
pub const LOCAL: u32 = 0x2005_0000;
/// This end cannot hold as many inbound Reads as the responder requests.
pub const INSUFFICIENT_IRD: u32 = 0x2006_0000;
/// None of the responder's RTR messages can be sent by this end.
pub const NO_MATCHING_RTR: u32 = 0x2007_0000;
