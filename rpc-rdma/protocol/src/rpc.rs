//! The part of ONC RPC (RFC 5531) that a transport must know: the program of a call, the begin of
//! its arguments, and their protection.

use crate::malformed::Malformed;
use crate::xdr::{Reader, UNIT, pad, put_word};

/// Bytes of a credential's or verifier's body, at most (RFC 5531 §8.2).
const MAX_AUTH: usize = 400;

/// Bytes of the longest reply header: xid, REPLY, reply_stat, a verifier, accept_stat, and
/// PROG_MISMATCH's two words.
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
    /// Transaction.
    pub xid: u32,
    /// Program.
    pub program: u32,
    /// Version of the program.
    pub version: u32,
    /// Procedure.
    pub procedure: u32,
    /// Must everything stay inline: is it protected by RPCSEC_GSS integrity or privacy, or part of
    /// a context's set-up (RFC 8166 §8.2)?
    pub protected: bool,
    /// Bytes of the header: where the arguments begin.
    pub len: usize,
}

impl CallHeader {
    /// Takes the header off an RPC message.
    ///
    /// # Errors
    /// It is cut short, no call, or not RPC version 2; or a credential is longer than RFC 5531
    /// allows.
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

/// rpc_gss_cred_t (RFC 2203 §5.2.2): version, gss_proc, seq_num, service. Only data under service
/// none is open.
fn gss_protects(credential: &[u8]) -> bool {
    let mut reader = Reader(credential);
    let mut word = || reader.word().ok();
    let (_version, procedure, _sequence, service) = (word(), word(), word(), word());
    procedure != Some(0) || service != Some(1)
}

/// Takes a counted opaque of at most `limit` bytes and its padding.
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

/// The header of a call that needs no credentials (AUTH_NONE); arguments follow.
pub fn call(xid: u32, program: u32, version: u32, procedure: u32) -> Vec<u8> {
    let mut call = Vec::new();
    for word in [xid, 0, RPC_VERSION, program, version, procedure, 0, 0, 0, 0] {
        put_word(word, &mut call);
    }
    call
}

/// The header of a reply to a call that was carried out; results follow, [`SUCCESS_LEN`] bytes from
/// the beginning.
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

/// Bytes of what [`success`] makes.
pub const SUCCESS_LEN: usize = 6 * UNIT;

/// The reply that says that a call's arguments made no sense (RFC 8166 §4.5.2).
pub fn garbage_args(xid: u32) -> Vec<u8> {
    accepted(xid, GARBAGE_ARGS)
}

/// The reply that says that there is no such procedure.
pub fn proc_unavail(xid: u32) -> Vec<u8> {
    accepted(xid, PROC_UNAVAIL)
}
