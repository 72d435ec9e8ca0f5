//! The part of ONC RPC (RFC 5531) that a transport needs: the program of a call, the beginning of
//! its arguments, and their protection.

use crate::malformed::Malformed;
use crate::xdr::{Reader, UNIT, pad, put_word};

/// Maximum bytes of the body of a credential or verifier (RFC 5531 §8.2).
const MAX_AUTH: usize = 400;

/// Bytes of the longest reply header: xid, REPLY, reply_stat, a verifier, accept_stat, and the two
/// words of PROG_MISMATCH.
pub const MAX_REPLY_HEADER: usize = 5 * UNIT + (UNIT + MAX_AUTH) + 2 * UNIT;

const RPC_VERSION: u32 = 2;
const MSG_ACCEPTED: u32 = 0;
const SUCCESS: u32 = 0;
const PROC_UNAVAIL: u32 = 3;
const GARBAGE_ARGS: u32 = 4;
const RPCSEC_GSS: u32 = 6;

/// The header of an RPC call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallHeader {
    /// Transaction id.
    pub xid: u32,
    /// RPC program number.
    pub program: u32,
    /// Version of the program.
    pub version: u32,
    /// Procedure of the program.
    pub procedure: u32,
    /// Whether the arguments and results must stay inline: RPCSEC_GSS protects their integrity or
    /// privacy, or the call is part of a context's set-up (RFC 8166 §8.2).
    pub protected: bool,
    /// Bytes of the header. The arguments begin after it.
    pub len: usize,
}

impl CallHeader {
    /// Parses the header of an RPC message.
    ///
    /// # Errors
    /// The message is truncated, is no call, has an RPC version other than 2, or has a longer
    /// credential than RFC 5531 permits.
    pub fn parse(message: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader(message);
        let xid = reader.word()?;
        if reader.word()? != 0 || reader.word()? != RPC_VERSION {
            return Err(Malformed::Direction);
        }
        let (program, version, procedure) = (reader.word()?, reader.word()?, reader.word()?);
        let (flavor, body) = (reader.word()?, opaque(&mut reader, MAX_AUTH)?);
        let _verifier = (reader.word()?, opaque(&mut reader, MAX_AUTH)?);
        Ok(Self {
            xid,
            program,
            version,
            procedure,
            protected: flavor == RPCSEC_GSS && gss_protects(body),
            len: message.len() - reader.0.len(),
        })
    }
}

/// Whether rpc_gss_cred_t (version, gss_proc, seq_num, service; RFC 2203 §5.2.2) protects the call.
/// Only data with service "none" is unprotected.
fn gss_protects(credential: &[u8]) -> bool {
    let mut reader = Reader(credential);
    let mut word = || reader.word().ok();
    let (_version, procedure, _sequence, service) = (word(), word(), word(), word());
    procedure != Some(0) || service != Some(1)
}

/// Parses a counted opaque of at most `limit` bytes and its padding.
fn opaque<'a>(reader: &mut Reader<'a>, limit: usize) -> Result<&'a [u8], Malformed> {
    let len = reader.word()? as usize;
    let padded = len + pad(len as u64) as usize;
    if len > limit || padded > reader.0.len() {
        return Err(Malformed::Truncated);
    }
    let (body, rest) = reader.0.split_at(padded);
    reader.0 = rest;
    Ok(&body[..len])
}

/// The header of a call without credentials (AUTH_NONE). The arguments follow it.
pub fn call(xid: u32, program: u32, version: u32, procedure: u32) -> Vec<u8> {
    let mut call = Vec::new();
    for word in [xid, 0, RPC_VERSION, program, version, procedure, 0, 0, 0, 0] {
        put_word(word, &mut call);
    }
    call
}

/// The header of a successful reply. The results follow it, [`SUCCESS_LEN`] bytes from the
/// beginning.
pub fn success(xid: u32) -> Vec<u8> {
    accepted(xid, SUCCESS)
}

fn accepted(xid: u32, status: u32) -> Vec<u8> {
    let mut reply = Vec::new();
    for word in [xid, 1, MSG_ACCEPTED, 0, 0, status] {
        put_word(word, &mut reply);
    }
    reply
}

/// Bytes of the header that [`success`] returns.
pub const SUCCESS_LEN: usize = 6 * UNIT;

/// The reply to a call with invalid arguments (GARBAGE_ARGS, RFC 8166 §4.5.2).
pub fn garbage_args(xid: u32) -> Vec<u8> {
    accepted(xid, GARBAGE_ARGS)
}

/// The reply to a call of an unknown procedure (PROC_UNAVAIL).
pub fn proc_unavail(xid: u32) -> Vec<u8> {
    accepted(xid, PROC_UNAVAIL)
}
