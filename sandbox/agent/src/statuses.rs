//! Errors as gRPC statuses, of which the daemon makes errors again.

use slipway_agent_protocol::EXIT_STATUS_METADATA;
use tonic::{Code, Status};

use crate::process::Failure;
use crate::table::Refused;

/// Converts an error in a request to a gRPC status.
pub fn invalid(error: anyhow::Error) -> Status {
    Status::invalid_argument(format!("{error:#}"))
}

/// Converts an error of the machine to a gRPC status.
pub fn internal(error: anyhow::Error) -> Status {
    Status::internal(format!("{error:#}"))
}

/// Converts the error of a request that the state of the container or of the machine does not
/// permit to a gRPC status.
pub fn precondition(error: anyhow::Error) -> Status {
    Status::failed_precondition(format!("{error:#}"))
}

/// Converts the reason why an id was not reserved to a gRPC status.
pub fn refusal(refused: Refused, what: &str, id: &str) -> Status {
    match refused {
        Refused::Taken => Status::already_exists(format!("{what} {id} exists")),
        Refused::Closed => {
            Status::unavailable(format!("no {what} {id} was made: the sandbox is ending"))
        }
    }
}

/// Converts a failure to a gRPC status. A failure of the program itself carries
/// [`EXIT_STATUS_METADATA`].
pub fn status(failure: &Failure) -> Status {
    let code = match failure.exit_status {
        crate::init::NOT_FOUND => Code::NotFound,
        0 => Code::FailedPrecondition,
        _ => Code::PermissionDenied,
    };
    let mut status = Status::new(code, failure.message.clone());
    if failure.exit_status != 0 {
        let value = tonic::metadata::MetadataValue::from(failure.exit_status);
        status.metadata_mut().insert(EXIT_STATUS_METADATA, value);
    }
    status
}
