-- Lease permits of one endpoint to one worker: the global bound on requests in flight.
--
-- KEYS[1] permits   hash    owner -> "held|wanted|expiry": permits it may use until expiry (milliseconds, Redis' clock)
-- KEYS[2] bound     string  a bound that a person has set, in the place of the worker's own
-- ARGV    owner, in use, wanted, the worker's own bound, time to live in ms
--
-- Every owner gets its fair share of the bound (max-min fairness over what is wanted), but never more than the others
-- leave free: the sum of all held permits stays within the bound. An owner keeps at least what it has in use.
-- Returns {held, bound, others, share}: others is what living owners other than this one hold; share is how many of
-- the held permits may be handed on to new calls, so that a busy owner shrinks when others come.
local owner, in_use, wanted = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local bound = tonumber(redis.call('GET', KEYS[2]) or '') or tonumber(ARGV[4])
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local wants, others, known = {{owner, wanted}}, 0, false
local entries = redis.call('HGETALL', KEYS[1])
for i = 1, #entries, 2 do
    local held, want, expiry = string.match(entries[i + 1], '^(%d+)|(%d+)|(%d+)$')
    if entries[i] == owner then
        known = tonumber(expiry) > now
    elseif tonumber(expiry) <= now then
        redis.call('HDEL', KEYS[1], entries[i])
    else
        others = others + tonumber(held)
        wants[#wants + 1] = {entries[i], tonumber(want)}
    end
end

-- Smallest wish first: whoever wants less than an equal share leaves the rest to the others.
table.sort(wants, function(a, b) return a[2] < b[2] or (a[2] == b[2] and a[1] < b[1]) end)
local left, share = bound, 0
for i, wish in ipairs(wants) do
    local give = math.min(wish[2], math.ceil(left / (#wants - i + 1)))
    left = left - give
    if wish[1] == owner then share = give end
end

share = math.min(share, math.max(0, bound - others))
local held = math.max(in_use, share)
if in_use > 0 and not known then
    -- Redis has forgotten this owner, and so perhaps others that also have calls running: do not grow yet.
    held, share = in_use, in_use
end
if held == 0 and wanted == 0 then
    redis.call('HDEL', KEYS[1], owner)
else
    redis.call('HSET', KEYS[1], owner, string.format('%d|%d|%d', held, wanted, now + tonumber(ARGV[5])))
end
return {held, bound, others, share}
