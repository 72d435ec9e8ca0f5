//! Procedures of NFSv3 on a file system (RFC 1813 §3.3): FSSTAT, FSINFO, PATHCONF.

use super::export::{Export, answer};
use crate::nfs3::{FsinfoOk, FsstatOk, Handle, MAX_NAME, MAX_TRANSFER, PathconfOk, Status, Time};
use crate::xdr::{BadXdr, Reader, Xdr};

/// Properties of FSINFO: LINK, SYMLINK, HOMOGENEOUS, CANSETTIME (RFC 1813 §3.3.19).
const PROPERTIES: u32 = 1 | 2 | 8 | 16;

impl Export {
    pub(super) fn fsstat(&self, args: &mut Reader<'_>, out: &mut Vec<u8>) -> Result<(), BadXdr> {
        let file = Handle::take(args)?;
        let attributes = self.after(&file);
        let known = attributes
            .ok_or(Status::Stale)
            .and_then(|_| self.tree.statistics());
        let found = known.map(|statistics| FsstatOk {
            attributes,
            statistics,
        });
        answer(found, |status| (status, attributes), out);
        Ok(())
    }

    pub(super) fn fsinfo(&self, args: &mut Reader<'_>, out: &mut Vec<u8>) -> Result<(), BadXdr> {
        let file = Handle::take(args)?;
        let attributes = self.after(&file);
        let found = attributes.ok_or(Status::Stale).map(|_| FsinfoOk {
            attributes,
            read_max: MAX_TRANSFER,
            read_best: MAX_TRANSFER,
            read_multiple: 4096,
            write_max: MAX_TRANSFER,
            write_best: MAX_TRANSFER,
            write_multiple: 4096,
            readdir_best: 64 << 10,
            max_size: i64::MAX as u64,
            time_delta: Time { seconds: 0, nanos: 1 },
            properties: PROPERTIES,
        });
        answer(found, |status| (status, attributes), out);
        Ok(())
    }

    pub(super) fn pathconf(&self, args: &mut Reader<'_>, out: &mut Vec<u8>) -> Result<(), BadXdr> {
        let file = Handle::take(args)?;
        let attributes = self.after(&file);
        let found = attributes.ok_or(Status::Stale).map(|_| PathconfOk {
            attributes,
            max_links: 32000,
            max_name: MAX_NAME as u32,
            no_trunc: true,
            chown_restricted: true,
            case_insensitive: false,
            case_preserving: true,
        });
        answer(found, |status| (status, attributes), out);
        Ok(())
    }
}
