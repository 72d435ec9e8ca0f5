//! ONC RPC version 2 (RFC 5531): headers of calls and replies, and replies to calls that cannot be
//! served.

use crate::xdr::{BadXdr, Reader, Xdr, words};

const CALL: u32 = 0;
const REPLY: u32 = 1;
const RPC_VERSION: u32 = 2;
const AUTH_NONE: u32 = 0;
const AUTH_SYS: u32 = 1;

/// Maximum bytes of the body of a credential or verifier (§8.2).
const MAX_AUTH: usize = 400;

/// Maximum groups in an AUTH_SYS credential (appendix A).
pub const MAX_GROUPS: usize = 16;

words! {
    /// accept_stat (§9): why an accepted call has no results.
    #[derive(thiserror::Error)]
    pub enum Refusal {
        /// PROG_UNAVAIL
        #[error("the server has no such program")]
        NoProgram = 1,
        /// PROG_MISMATCH
        #[error("the server has no such version of the program")]
        NoVersion = 2,
        /// PROC_UNAVAIL
        #[error("the program has no such procedure")]
        NoProcedure = 3,
        /// GARBAGE_ARGS
        #[error("the server cannot decode the arguments")]
        Garbage = 4,
        /// SYSTEM_ERR
        #[error("the server has a system error, such as a lack of memory")]
        System = 5,
    }
}

/// The credential of a call, as the client claims it (appendix A).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Credential {
    /// AUTH_NONE.
    Anonymous,
    /// AUTH_SYS.
    System {
        /// User.
        uid: u32,
        /// Group.
        gid: u32,
        /// Further groups, at most [`MAX_GROUPS`].
        groups: Vec<u32>,
    },
}

/// The header of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Transaction.
    pub xid: u32,
    /// Program.
    pub program: u32,
    /// Version of the program.
    pub version: u32,
    /// Procedure.
    pub procedure: u32,
    /// Identity of the caller.
    pub credential: Credential,
}

/// The treatment of a message that is no call, or a call that cannot be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoCall {
    /// Discard it.
    Discard,
    /// Send this reply.
    Answer(Vec<u8>),
}

impl From<BadXdr> for NoCall {
    fn from(_: BadXdr) -> Self {
        Self::Discard
    }
}

impl Call {
    /// Parses a message into the header and a reader of the arguments.
    ///
    /// # Errors
    /// The message is no call, has an RPC version other than 2, or has an unsupported or invalid
    /// credential.
    pub fn parse(message: &[u8]) -> Result<(Self, Reader<'_>), NoCall> {
        const MSG_DENIED: u32 = 1;
        const RPC_MISMATCH: u32 = 0;
        const AUTH_ERROR: u32 = 1;
        const AUTH_BADCRED: u32 = 1;
        let reader = &mut Reader(message);
        let (xid, direction) = <(u32, u32)>::take(reader)?;
        if direction != CALL {
            return Err(NoCall::Discard);
        }
        let deny = |words: &[u32]| {
            let mut reply = Vec::new();
            for word in [xid, REPLY, MSG_DENIED].iter().chain(words) {
                word.put(&mut reply);
            }
            NoCall::Answer(reply)
        };
        if u32::take(reader)? != RPC_VERSION {
            return Err(deny(&[RPC_MISMATCH, RPC_VERSION, RPC_VERSION]));
        }
        let (program, (version, procedure)) = Xdr::take(reader)?;
        let (flavor, body) = <(u32, &[u8])>::take(reader)?;
        let (_, verifier) = <(u32, &[u8])>::take(reader)?;
        let credential = match flavor {
            _ if body.len().max(verifier.len()) > MAX_AUTH => None,
            AUTH_NONE => Some(Credential::Anonymous),
            AUTH_SYS => system(body).ok(),
            _ => None,
        };
        let Some(credential) = credential else {
            return Err(deny(&[AUTH_ERROR, AUTH_BADCRED]));
        };
        let call = Self {
            xid,
            program,
            version,
            procedure,
            credential,
        };
        Ok((call, *reader))
    }

    /// The header in bytes. The arguments follow it.
    pub fn emit(&self) -> Vec<u8> {
        let mut message = Vec::new();
        for word in [
            self.xid,
            CALL,
            RPC_VERSION,
            self.program,
            self.version,
            self.procedure,
        ] {
            word.put(&mut message);
        }
        match &self.credential {
            Credential::Anonymous => (AUTH_NONE, 0_u32).put(&mut message),
            Credential::System { uid, gid, groups } => {
                let mut body = Vec::new();
                (0_u32, &b""[..]).put(&mut body);
                (*uid, *gid).put(&mut body);
                let groups = &groups[..groups.len().min(MAX_GROUPS)];
                (groups.len() as u32).put(&mut body);
                groups.iter().for_each(|group| group.put(&mut body));
                (AUTH_SYS, &body[..]).put(&mut message);
            }
        }
        (AUTH_NONE, 0_u32).put(&mut message);
        message
    }
}

/// Parses authsys_parms (appendix A).
fn system(body: &[u8]) -> Result<Credential, BadXdr> {
    let reader = &mut Reader(body);
    let (_stamp, _machine) = <(u32, &[u8])>::take(reader)?;
    let (uid, gid) = Xdr::take(reader)?;
    let count = u32::take(reader)?;
    if count as usize > MAX_GROUPS {
        return Err(BadXdr::Length(count));
    }
    let groups = (0..count).map(|_| u32::take(reader)).collect::<Result<_, _>>()?;
    Ok(Credential::System { uid, gid, groups })
}

/// The header of a reply that accepts a call. The results follow it.
pub fn accepted(xid: u32) -> Vec<u8> {
    let mut reply = Vec::with_capacity(256);
    for word in [xid, REPLY, 0, AUTH_NONE, 0, 0] {
        word.put(&mut reply);
    }
    reply
}

/// The reply to a call that cannot be served; `version` is the supported version of the program.
pub fn refused(xid: u32, refusal: Refusal, version: u32) -> Vec<u8> {
    let mut reply = Vec::new();
    for word in [xid, REPLY, 0, AUTH_NONE, 0, refusal as u32] {
        word.put(&mut reply);
    }
    if refusal == Refusal::NoVersion {
        (version, version).put(&mut reply);
    }
    reply
}

/// Reasons why a reply has no results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoResults {
    /// The call was accepted but not served.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The call was rejected, because of the version of RPC or the credential.
    #[error("the server denies the call: it does not accept the credentials")]
    Denied,
    /// The message is no reply.
    #[error("the reply is invalid: {0}")]
    Malformed(#[from] BadXdr),
}

/// Parses the header of a reply and leaves the results in the reader.
///
/// # Errors
/// The reply has no results.
pub fn results(message: &[u8]) -> Result<Reader<'_>, NoResults> {
    let reader = &mut Reader(message);
    let (_xid, direction) = <(u32, u32)>::take(reader)?;
    if direction != REPLY {
        return Err(BadXdr::Value(direction).into());
    }
    if u32::take(reader)? != 0 {
        return Err(NoResults::Denied);
    }
    let _verifier = <(u32, &[u8])>::take(reader)?;
    if u32::take(&mut reader.clone())? != 0 {
        return Err(Refusal::take(reader)?.into());
    }
    u32::take(reader)?;
    Ok(*reader)
}
