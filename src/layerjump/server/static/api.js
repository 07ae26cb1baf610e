// Requests to the server. A busy server answers with the position in its queue; the page repeats the request.

const PAUSE = 200; // ms between two requests; the server itself waits up to two seconds
const POLL_FIT = 400; // ms between two requests for the progress of a fit

export class Refused extends Error {}

async function reach(path, body, signal) {
  const options = body === undefined ? {} : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  };
  try {
    return await fetch(path, { ...options, signal });
  } catch (error) {
    throw unreachable(error);
  }
}

function unreachable(error) {
  if (error.name === "AbortError") return error;
  return new Refused("The server does not answer. Is layerjump serve still running?");
}

async function once(path, body, signal) {
  const response = await reach(path, body, signal);
  const answer = await response.json();
  if (!response.ok && !answer.busy) throw new Refused(answer.error);
  return answer;
}

// Repeat a request until it is answered; `waiting` gets the answers of a busy server.
export async function ask(path, body, { signal, waiting = () => {} } = {}) {
  for (;;) {
    const answer = await once(path, body, signal);
    if (!answer.busy) return answer;
    waiting(answer);
    await pause(PAUSE);
    signal?.throwIfAborted();
  }
}

// Read an answer in JSON lines: `each` gets one line after the other. Aborting closes the connection.
export async function follow(path, body, { signal, each }) {
  const response = await reach(path, body, signal);
  if (!response.ok) throw new Refused((await response.json()).error);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      throw unreachable(error);
    }
    if (part.done) return;
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines.map((text) => JSON.parse(text))) {
      if (line.error) throw new Refused(line.error);
      each(line);
    }
  }
}

// Fit estimators; `progress` gets the status of the job until it is done.
export async function fit(model, estimators, { signal, progress }) {
  let job = await ask("/api/fit", { model, estimators }, { signal });
  while (job.state === "waiting" || job.state === "fitting") {
    progress(job);
    await pause(POLL_FIT);
    job = await ask(`/api/jobs/${job.id}`, undefined, { signal });
  }
  if (job.state === "failed") throw new Refused(job.error);
}

function pause(ms) {
  return new Promise((resume) => setTimeout(resume, ms));
}
