//! A check and its name.

use crate::outcome::Outcome;
use crate::rig::Rig;

/// One requirement of the datasheet.
pub(crate) struct Check {
    /// Names of the chapter and the requirement.
    pub(crate) name: &'static str,
    pub(crate) run: fn(&Rig) -> Outcome,
}

/// Makes the list of a chapter's checks; the name of a check consists of its module and its
/// function.
macro_rules! checks {
    ($($name:ident,)*) => {
        pub(super) const ALL: &[$crate::check::Check] = &[$($crate::check::Check {
            name: {
                const NAME: &str = concat!(module_path!(), "::", stringify!($name));
                $crate::check::short(NAME)
            },
            run: $name,
        },)*];
    };
}
pub(crate) use checks;

/// The last two parts of the path of a check.
pub(crate) const fn short(path: &'static str) -> &'static str {
    const CHAPTERS: usize = concat!(env!("CARGO_CRATE_NAME"), "::checks::").len();
    path.split_at(CHAPTERS).1
}
