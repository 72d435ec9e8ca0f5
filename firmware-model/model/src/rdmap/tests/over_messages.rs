//! The rows that do not depend on the lower layer, over a stream of messages, as SCTP has. The same
//! tests run over MPA.

#![expect(clippy::duplicate_mod, reason = "the same tests over another lower layer")]

use super::vector;
use crate::testing::rig::{PairOver, ScriptedOver};

type Pair = PairOver<true>;
type Scripted = ScriptedOver<true>;

#[path = "ddp_rows.rs"]
mod ddp_rows;
#[path = "delivery_rows.rs"]
mod delivery_rows;
#[path = "early_rows.rs"]
mod early_rows;
#[path = "ending_rows.rs"]
mod ending_rows;
#[path = "extension_rows.rs"]
mod extension_rows;
#[path = "filled_rows.rs"]
mod filled_rows;
#[path = "message_rows.rs"]
mod message_rows;
#[path = "native.rs"]
mod native;
#[path = "properties.rs"]
mod properties;
#[path = "rdmap_rows.rs"]
mod rdmap_rows;
#[path = "read_rows.rs"]
mod read_rows;
#[path = "revocation_rows.rs"]
mod revocation_rows;
#[path = "sequence_rows.rs"]
mod sequence_rows;
#[path = "silence.rs"]
mod silence;
#[path = "state_rows.rs"]
mod state_rows;
#[path = "unreliable_rows.rs"]
mod unreliable_rows;
#[path = "verbs_rows.rs"]
mod verbs_rows;
