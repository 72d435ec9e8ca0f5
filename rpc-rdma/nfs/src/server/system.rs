//! Procedures of NFSv3 on a file system (RFC 1813 §3.3): FSSTAT, FSINFO, PATHCONF.

use super::export::Export;
use crate::nfs3::{
    Attributes, FsinfoOk, FsstatOk, Handle, MAX_NAME, MAX_TRANSFER, PathconfOk, Reply, Status, Time,
};

/// Properties of FSINFO: LINK, SYMLINK, HOMOGENEOUS, CANSETTIME (RFC 1813 §3.3.19).
const PROPERTIES: u32 = 1 | 2 | 8 | 16;

impl Export {
    /// The attributes of a file; an error if there is no such file.
    fn existing(&self, file: Handle) -> Reply<Option<Attributes>, Option<Attributes>> {
        self.after(&file).map(Some).ok_or((Status::Stale, None))
    }

    pub(super) fn fsstat(&self, file: Handle) -> Reply<FsstatOk, Option<Attributes>> {
        let attributes = self.existing(file)?;
        let statistics = self.tree.statistics().map_err(|status| (status, attributes))?;
        Ok(FsstatOk {
            attributes,
            statistics,
        })
    }

    pub(super) fn fsinfo(&self, file: Handle) -> Reply<FsinfoOk, Option<Attributes>> {
        Ok(FsinfoOk {
            attributes: self.existing(file)?,
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
        })
    }

    pub(super) fn pathconf(&self, file: Handle) -> Reply<PathconfOk, Option<Attributes>> {
        Ok(PathconfOk {
            attributes: self.existing(file)?,
            max_links: 32000,
            max_name: MAX_NAME as u32,
            no_trunc: true,
            chown_restricted: true,
            case_insensitive: false,
            case_preserving: true,
        })
    }
}
