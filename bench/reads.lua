-- Requests random customers from a file of ids, and prints one line of JSON at the end.

local threads = 0
function setup(thread)
  threads = threads + 1
  thread:set("seed", threads)
end

local requests = {}
function init(arguments)
  math.randomseed(seed)
  for customer in io.lines(arguments[1]) do
    requests[#requests + 1] = wrk.format("GET", arguments[2] .. "?customerId=" .. customer)
  end
end

function request()
  return requests[math.random(#requests)]
end

function done(summary, latency, _)
  local errors = summary.errors
  io.write(string.format('\n{"requests": %d, "seconds": %.6f, "p50_ms": %.4f, "p99_ms": %.4f, "failed": %d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
