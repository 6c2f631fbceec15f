-- Store payloads. A later round takes the place of an earlier one, which is on disk: whatever Redis still holds of the
-- earlier one goes, so that nobody takes its worker for the one that asks the later one.
--
-- KEYS[1] prompts, KEYS[2] flights, KEYS[3] deaths, KEYS[4] crashes, KEYS[5] suspects, KEYS[6] again:failed,
-- KEYS[7] again:rejected
-- ARGV    folder, whether to replace payloads of the same round, then for each sample: id, payload, and what it is on
--         disk as (failed, rejected or nothing)
--
-- Returns for each sample 1 when its round was not there yet, else 0.
local FOLDER, REPLACE = ARGV[1], ARGV[2] == '1'
local AGAIN = {failed = KEYS[6], rejected = KEYS[7]}
local fresh = {}
for at = 3, #ARGV, 3 do
    local id, payload, before = ARGV[at], ARGV[at + 1], ARGV[at + 2]
    local new = redis.call('HSETNX', KEYS[1], id, payload)
    if new == 0 then
        local there, wanted = round_of(redis.call('HGET', KEYS[1], id)), round_of(payload)
        if wanted > there then
            new = 1
            for key = 2, 4 do
                redis.call('HDEL', KEYS[key], id)
            end
            redis.call('HDEL', KEYS[5], FOLDER .. '|' .. id)
        end
        if wanted > there or (wanted == there and REPLACE) then
            redis.call('HSET', KEYS[1], id, payload)
        end
    end
    if AGAIN[before] then
        redis.call('SADD', AGAIN[before], id)
    end
    fresh[#fresh + 1] = new
end
return fresh
