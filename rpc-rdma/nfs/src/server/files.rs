//! Procedures of NFSv3 on one file (RFC 1813 §3.3): attributes, access, contents.

use super::export::{Export, with};
use crate::memory::Slice;
use crate::nfs3::{
    AccessArgs, AccessOk, Attributes, CommitArgs, CommitOk, Handle, MAX_TRANSFER, ReadArgs, ReadOk,
    ReadlinkOk, Reply, SetattrArgs, Status, Wcc, WriteArgs, WriteOk,
};
use crate::tree::{Caller, Data, Found};

/// Bits of ACCESS for changes: MODIFY, EXTEND, DELETE (RFC 1813 §3.3.4).
const CHANGES: u32 = 0b1_1100;

/// A reply with the data that follow it.
type WithData<T> = (Reply<T, Option<Attributes>>, Option<Vec<Slice>>);

impl Export {
    pub(super) fn getattr(&self, file: Handle) -> Reply<Attributes, ()> {
        self.tree.attributes(&file).map_err(|status| (status, ()))
    }

    pub(super) fn setattr(&self, caller: &Caller, args: SetattrArgs) -> Reply<Wcc, Wcc> {
        let SetattrArgs {
            file,
            attributes,
            guard,
        } = args;
        let (done, wcc) = self.around(&file, || {
            self.tree.set_attributes(caller, &file, &attributes, guard)
        });
        with(done, wcc)
    }

    pub(super) fn access(&self, caller: &Caller, args: AccessArgs) -> Reply<AccessOk, Option<Attributes>> {
        let AccessArgs { file, access } = args;
        let permitted = if self.options.read_only { !CHANGES } else { !0 };
        let found = self.tree.access(caller, &file, access & permitted);
        let attributes = self.after(&file);
        let access = found.map_err(|status| (status, attributes))?;
        Ok(AccessOk { attributes, access })
    }

    /// READLINK. The data are the text.
    pub(super) fn readlink(&self, file: Handle) -> WithData<ReadlinkOk> {
        let found = self.tree.read_link(&file).and_then(|text| {
            let mut memory = self.tree.pool().take(text.len()).ok_or(Status::Jukebox)?;
            memory.copy_from_slice(&text);
            Ok(memory.share())
        });
        let attributes = self.after(&file);
        match found {
            Ok(text) => {
                let len = text.len() as u32;
                (Ok(ReadlinkOk { attributes, len }), Some(vec![text]))
            }
            Err(status) => (Err((status, attributes)), None),
        }
    }

    pub(super) fn read(&self, caller: &Caller, args: ReadArgs) -> WithData<ReadOk> {
        let ReadArgs { file, offset, count } = args;
        let found = self.tree.read(caller, &file, offset, count.min(MAX_TRANSFER));
        let attributes = self.after(&file);
        match found {
            Ok(Found { pieces, eof }) => {
                let len = pieces.iter().map(|piece| piece.len()).sum::<usize>() as u32;
                let read = ReadOk {
                    attributes,
                    count: len,
                    eof,
                    len,
                };
                (Ok(read), Some(pieces))
            }
            Err(status) => (Err((status, attributes)), None),
        }
    }

    pub(super) fn write(&self, caller: &Caller, args: WriteArgs, data: Data<'_>) -> Reply<WriteOk, Wcc> {
        let WriteArgs {
            file, offset, stable, ..
        } = args;
        let (done, wcc) = self.around(&file, || self.tree.write(caller, &file, offset, data, stable));
        let (count, committed) = done.map_err(|status| (status, wcc))?;
        Ok(WriteOk {
            wcc,
            count,
            committed,
            verifier: self.verifier,
        })
    }

    pub(super) fn commit(
        &self,
        caller: &Caller,
        CommitArgs { file, .. }: CommitArgs,
    ) -> Reply<CommitOk, Wcc> {
        let (done, wcc) = self.around(&file, || self.tree.commit(caller, &file));
        done.map_err(|status| (status, wcc))?;
        Ok(CommitOk {
            wcc,
            verifier: self.verifier,
        })
    }
}
