//! Procedures of NFSACL version 3.

use super::export::{Export, Made, with};
use crate::nfs3::{Reply, Status};
use crate::nfsacl::{self, GetaclArgs, Lists, Procedure, SetaclArgs};
use crate::rpc::{self, Call};
use crate::xdr::{Reader, Xdr};

impl Export {
    /// Answers a call of NFSACL.
    pub(super) fn nfsacl(&self, call: &Call, procedure: Procedure, mut arguments: Reader<'_>) -> Made {
        let mut reply = rpc::accepted(call.xid);
        let (args, out) = (&mut arguments, &mut reply);
        match procedure {
            Procedure::Null => {}
            Procedure::Getacl => {
                let GetaclArgs { file, mask } = Xdr::take(args)?;
                let found = nfsacl::check_mask(mask).and_then(|()| self.tree.acls(&file));
                let attributes = self.after(&file);
                let found = found.and_then(|acls| {
                    let is = attributes.ok_or(Status::Stale)?;
                    Ok((attributes, Lists::of(&acls, mask, is.uid, is.gid)?))
                });
                let reply: Reply<_, _> = found.map_err(|status| (status, attributes));
                reply.put(out);
            }
            Procedure::Setacl => {
                let (file, lists): SetaclArgs = Xdr::take(args)?;
                let change = self.may_change().and_then(|()| lists.change());
                let caller = self.caller(&call.credential);
                let set = change.and_then(|what| self.tree.set_acls(&caller, &file, &what));
                let attributes = self.after(&file);
                with(set, attributes).put(out);
            }
        }
        Ok((reply, None))
    }
}
