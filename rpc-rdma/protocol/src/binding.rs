//! Upper Layer Bindings (RFC 8166 §6): which arguments and results of a program are DDP-eligible,
//! and how long its replies can get. The crate of a program has its bindings.
//!
//! A requester passes the call that it has encoded, without the item, to [`bound`], which returns
//! the place of the item and the memory that the reply needs. A responder passes received Read
//! chunks to [`check`] before it reads the arguments.

use crate::rpc::{CallHeader, MAX_REPLY_HEADER};
use crate::xdr::{UNIT, pad};

/// The binding of one version of one program.
pub trait Binding {
    /// Program and version.
    fn program(&self) -> (u32, u32);

    /// TCP port of the program over RDMA on iWARP, if it has one of its own; else ask rpcbind.
    fn port(&self) -> Option<u16> {
        None
    }

    /// The offset in `arguments`, behind the count, of the argument that may move by Read chunk.
    /// `arguments` must have everything before it. `None`: the procedure has none, or the arguments
    /// are invalid.
    fn argument(&self, _procedure: u32, _arguments: &[u8]) -> Option<usize> {
        None
    }

    /// Bytes of the result that may move by Write chunk, at most. `None`: the procedure has none.
    fn result(&self, _procedure: u32, _arguments: &[u8]) -> Option<u32> {
        None
    }

    /// Bytes of all other results, at most. `None`: the protocol has no limit, so the caller must
    /// set one.
    fn max_results(&self, procedure: u32, arguments: &[u8]) -> Option<usize>;

    /// Whether a server may make this call to its client (RFC 8167). NULL is always permitted.
    fn backward(&self, _procedure: u32) -> bool {
        false
    }
}

/// Whether a server may make this call, backward: [`Binding::backward`] says so, or its program has
/// no binding here, and it may go without chunks.
pub fn may_go_backward(bindings: &[&dyn Binding], call: &CallHeader) -> bool {
    const NULL: u32 = 0;
    let of_program = |binding: &&&dyn Binding| binding.program() == (call.program, call.version);
    call.procedure == NULL
        || (bindings.iter().find(of_program)).is_none_or(|binding| binding.backward(call.procedure))
}

/// The limits of one call by its binding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bound {
    /// Where the argument that may go by Read chunk begins: bytes of the message before it. It is
    /// an [`Item`](crate::engine::Item)'s offset.
    pub argument: Option<usize>,
    /// Bytes of the result that may come by Write chunk, at most.
    pub result: Option<u32>,
    /// Bytes of the rest of the reply message, at most:
    /// [`Call::max_reply`](crate::engine::Call::max_reply).
    pub max_reply: Option<usize>,
}

/// What may go by chunk in this call and its reply. Nothing, if the message is no call, its program
/// has no binding here (RFC 8166 §6 lets only those that have one), or RPCSEC_GSS protects it; the
/// reply's length is not known then.
pub fn bound(bindings: &[&dyn Binding], message: &[u8]) -> Bound {
    let Ok(header) = CallHeader::parse(message) else {
        return Bound::default();
    };
    let of_program = |binding: &&&dyn Binding| binding.program() == (header.program, header.version);
    let Some(binding) = bindings.iter().find(of_program).filter(|_| !header.protected) else {
        return Bound::default();
    };
    let (procedure, arguments) = (header.procedure, &message[header.len..]);
    Bound {
        argument: (binding.argument(procedure, arguments)).map(|offset| header.len + offset),
        result: binding.result(procedure, arguments),
        max_reply: (binding.max_results(procedure, arguments)).map(|len| MAX_REPLY_HEADER + len),
    }
}

/// Something came by Read chunk that may not, or whose length is not what its count says: to be
/// answered with [`garbage_args`](crate::rpc::garbage_args).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a Read chunk at Position {0} does not fit the arguments")]
pub struct Misplaced(pub u32);

/// Are `items`, Position and bytes of what came by Read chunk, what the program lets go that way?
/// `message` is the rest of the call, with nothing put in. A length may include the padding (RFC
/// 8166 §3.4.5.2).
///
/// # Errors
/// The first that is not.
pub fn check(bindings: &[&dyn Binding], message: &[u8], items: &[(u32, u64)]) -> Result<(), Misplaced> {
    let [first, rest @ ..] = items else {
        return Ok(());
    };
    let misplaced = Misplaced(first.0);
    let offset = bound(bindings, message).argument.ok_or(misplaced)?;
    let count = message
        .get(..offset)
        .and_then(|before| before.last_chunk::<UNIT>());
    let count = u64::from(u32::from_be_bytes(*count.ok_or(misplaced)?));
    // Nothing is left out before the first item, so that its Position is its offset.
    if first.0 as usize != offset || (first.1 != count && first.1 != count + pad(count)) {
        return Err(misplaced);
    }
    rest.first().map_or(Ok(()), |second| Err(Misplaced(second.0)))
}
