//! `slipway port-forward`: ports of the host that lead to ports of a sandbox, while it runs.

use anyhow::{Context, Result};
use futures_util::future::try_join_all;
use slipway_runtime::forward::carry;
use slipway_runtime::{Config, SandboxClient, v1};
use tokio::net::TcpListener;

use crate::args::{Forward, ForwardArgs, NodeArgs};
use crate::client::{connect, refused};

/// Serves the ports until it is interrupted. Returns the exit status.
pub async fn forward(node: &NodeArgs, config: &Config, args: &ForwardArgs) -> Result<i32> {
    let mut client = connect(node, config).await?;
    // A name that is wrong is said now, not at the first connection.
    let named = v1::Name { name: args.name.clone() };
    client.inspect(named).await.map_err(refused)?;
    let mut listeners = Vec::new();
    for forward in &args.ports {
        let listener = TcpListener::bind(forward.local).await;
        let listener = listener.with_context(|| format!("cannot listen at {}", forward.local))?;
        crate::say!("{} -> {}:{}", listener.local_addr()?, args.name, forward.port);
        listeners.push((listener, *forward));
    }
    let served = listeners
        .into_iter()
        .map(|(listener, forward)| serve(client.clone(), args.name.clone(), listener, forward));
    tokio::select! {
        served = try_join_all(served) => served.map(|_| 0),
        _ = tokio::signal::ctrl_c() => Ok(0),
    }
}

/// Accepts connections for ever.
async fn serve(
    client: SandboxClient,
    name: String,
    listener: TcpListener,
    forward: Forward,
) -> Result<()> {
    loop {
        let (stream, peer) = listener.accept().await.context("cannot accept connections")?;
        let (mut client, name) = (client.clone(), name.clone());
        tokio::spawn(async move {
            if let Err(status) = carry(&mut client, &name, forward.port, stream).await {
                crate::complain(&refused(status).context(format!("connection of {peer}")));
            }
        });
    }
}
