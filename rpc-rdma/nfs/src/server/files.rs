//! Procedures of NFSv3 on one file (RFC 1813 §3.3): attributes, access, contents.

use super::export::{Export, answer, data};
use crate::memory::Slice;
use crate::nfs3::{
    AccessArgs, AccessOk, CommitArgs, CommitOk, Handle, MAX_TRANSFER, ReadArgs, ReadOk, ReadlinkOk,
    SetattrArgs, Status, WriteArgs, WriteOk,
};
use crate::tree::{Caller, Found};
use crate::xdr::{BadXdr, Reader, Xdr};

/// Bits of ACCESS for changes: MODIFY, EXTEND, DELETE (RFC 1813 §3.3.4).
const CHANGES: u32 = 0b1_1100;

impl Export {
    pub(super) fn getattr(&self, args: &mut Reader<'_>, out: &mut Vec<u8>) -> Result<(), BadXdr> {
        let file = Handle::take(args)?;
        answer(self.tree.attributes(&file), |status| (status, ()), out);
        Ok(())
    }

    pub(super) fn setattr(
        &self,
        caller: &Caller,
        args: &mut Reader<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), BadXdr> {
        let SetattrArgs {
            file,
            attributes,
            guard,
        } = Xdr::take(args)?;
        let (done, wcc) = self.around(&file, || {
            self.tree.set_attributes(caller, &file, &attributes, guard)
        });
        answer(done.map(|()| wcc), |status| (status, wcc), out);
        Ok(())
    }

    pub(super) fn access(
        &self,
        caller: &Caller,
        args: &mut Reader<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), BadXdr> {
        let AccessArgs { file, access } = Xdr::take(args)?;
        let permitted = if self.options.read_only { !CHANGES } else { !0 };
        let found = self.tree.access(caller, &file, access & permitted);
        let attributes = self.after(&file);
        let found = found.map(|access| AccessOk { attributes, access });
        answer(found, |status| (status, attributes), out);
        Ok(())
    }

    /// READLINK. Returns the text, which follows the reply.
    pub(super) fn readlink(
        &self,
        args: &mut Reader<'_>,
        out: &mut Vec<u8>,
    ) -> Result<Option<Vec<Slice>>, BadXdr> {
        let file = Handle::take(args)?;
        let found = self.tree.read_link(&file).and_then(|text| {
            let mut memory = self.tree.pool().take(text.len()).ok_or(Status::Jukebox)?;
            memory.copy_from_slice(&text);
            Ok(memory.share())
        });
        let attributes = self.after(&file);
        let mut item = None;
        let found = found.map(|text| {
            let len = text.len() as u32;
            item = Some(vec![text]);
            ReadlinkOk { attributes, len }
        });
        answer(found, |status| (status, attributes), out);
        Ok(item)
    }

    /// READ. Returns the data, which follows the reply.
    pub(super) fn read(
        &self,
        caller: &Caller,
        args: &mut Reader<'_>,
        out: &mut Vec<u8>,
    ) -> Result<Option<Vec<Slice>>, BadXdr> {
        let ReadArgs { file, offset, count } = Xdr::take(args)?;
        let found = self.tree.read(caller, &file, offset, count.min(MAX_TRANSFER));
        let attributes = self.after(&file);
        let mut item = None;
        let found = found.map(|Found { pieces, eof }| {
            let len = pieces.iter().map(|piece| piece.len()).sum::<usize>() as u32;
            item = Some(pieces);
            ReadOk {
                attributes,
                count: len,
                eof,
                len,
            }
        });
        answer(found, |status| (status, attributes), out);
        Ok(item)
    }

    pub(super) fn write<'a>(
        &self,
        caller: &Caller,
        args: &mut Reader<'a>,
        item: Option<&'a Slice>,
        out: &mut Vec<u8>,
    ) -> Result<(), BadXdr> {
        let WriteArgs {
            file,
            offset,
            count,
            stable,
            len,
        } = Xdr::take(args)?;
        let data = data(item, len, args)?;
        if len != count || len > MAX_TRANSFER {
            return Err(BadXdr::Length(len));
        }
        let (done, wcc) = self.around(&file, || self.tree.write(caller, &file, offset, data, stable));
        let done = done.map(|(count, committed)| WriteOk {
            wcc,
            count,
            committed,
            verifier: self.verifier,
        });
        answer(done, |status| (status, wcc), out);
        Ok(())
    }

    pub(super) fn commit(
        &self,
        caller: &Caller,
        args: &mut Reader<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), BadXdr> {
        let CommitArgs { file, .. } = Xdr::take(args)?;
        let (done, wcc) = self.around(&file, || self.tree.commit(caller, &file));
        let verifier = self.verifier;
        let done = done.map(|()| CommitOk { wcc, verifier });
        answer(done, |status| (status, wcc), out);
        Ok(())
    }
}
